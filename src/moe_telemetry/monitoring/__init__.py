"""Rules, alerts and dashboards, generated from the catalog and one configuration."""
