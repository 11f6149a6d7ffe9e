"""Runs side by side: joined records as tables, pictures and pages.

`runs` reads and groups records, `tables` and `pictures` show a group, `page` writes the
report and the leaderboard.
"""
