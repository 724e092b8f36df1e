"""The web page of kinetod: captures, live processes, views, timeline and SQL, for one user on this machine."""
