A page for the day when something is wrong.
