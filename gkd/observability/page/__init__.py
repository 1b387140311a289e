"""report.html: what a run's files say, on one page that needs neither a server nor a network."""
