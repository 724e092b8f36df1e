"""The pages for many users: who looks is told by a certificate or by a proxy, and the daemon decides for that user."""
