"""``atlas play``: an environment, a planner and a page that shows both."""
