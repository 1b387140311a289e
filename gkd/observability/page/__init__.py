"""report.html: what a run's files hold, on one page that needs neither a server nor a network."""
