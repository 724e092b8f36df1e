"""The metrics under Dynolog's names, for dashboards and log readers that were made for it."""
