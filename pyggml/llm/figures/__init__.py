"""Counters of what contexts did, and the log lines about models and contexts."""
