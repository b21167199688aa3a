"""What people look at: the report of a campaign, model cards, trackers, generated documentation. Loads no framework."""
