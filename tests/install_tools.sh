#!/bin/sh
# Installs Prometheus (with promtool) and Alertmanager for the tests, where they are missing.
set -eu
missing=""
for tool in prometheus promtool; do
  command -v "$tool" >/dev/null 2>&1 || missing="prometheus"
done
if ! command -v alertmanager >/dev/null 2>&1 && ! command -v prometheus-alertmanager >/dev/null 2>&1; then
  missing="$missing alertmanager"
fi
[ -n "$missing" ] || exit 0

if command -v brew >/dev/null 2>&1; then
  for package in $missing; do brew install --quiet "$package"; done
elif command -v apt-get >/dev/null 2>&1; then
  packages=$(echo "$missing" | sed 's/alertmanager/prometheus-alertmanager/')
  if [ "$(id -u)" -ne 0 ]; then
    echo "The tests need $missing. Install as root: apt-get install --no-install-recommends $packages" >&2
    exit 1
  fi
  # The packages start services of their own, which the tests do not use: they run their own processes.
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # shellcheck disable=SC2086
  apt-get install -y -qq --no-install-recommends $packages >/dev/null
else
  echo "The tests need $missing on PATH: see https://prometheus.io/download/" >&2
  exit 1
fi
