"""The door for `dyno` and other clients of Dynolog: its requests, and what they become here."""
