"""Processes whose libkineto polls this daemon as it would poll Dynolog: their datagrams, and who they are."""
