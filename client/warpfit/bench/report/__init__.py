"""The report of `warpfit bench`: findings, answers in sentences, plots and the page."""
