"""The text of the help screen."""

HELP = """\
1 overview   2 layers   3 endpoints   4 c pool   q quit
space  pause (scraping goes on)               e E  next, former endpoint
s S    layers by the next, the former column  r    turn their order
d      layers of decode or of prefill

tok/s     tokens a second of forward passes; idle is not slow
hit rate  share of the routed experts that were resident; the rest are
          late (predicted, read too late), evicted (predicted, read, gone
          again) and unpredicted
recall    share of the routed experts that were predicted
all hit   share of the layer calls that found every expert resident
union     distinct experts of one layer call, by tokens per sequence: p50,
          p99 and max; ! is above the smallest pool; calls a second
% of wall  host time; a pass counts when it ends, a long one can be above
          100
pool      hit rate of LRU pools without prefetch; > is the actual size,
          ▒ what it hits more, ░ less; knee: up to there a slot adds more
          than the average one
-         no figure, and why: "idle" is nothing in this interval, "none
          yet" nothing in this run, "no pool" what the runtime has not
░▒▓█      behind a layer's hit rate: misses above 0, 5, 15 and 30 %
Trends are of ten minutes; shares from 0 to 100 %; a gap is no figure.
Any key closes this."""
