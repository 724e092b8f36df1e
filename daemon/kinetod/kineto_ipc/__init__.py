"""Serves processes whose libkineto polls this daemon as it would poll Dynolog: their datagrams and identities."""
