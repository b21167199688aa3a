"""Drills: a campaign disturbed at random moments must end as the one that was left alone. Loads no framework. Linux only."""
