"""Laying kinetod down on a host: users, units, configuration, folders; and taking it away again."""
