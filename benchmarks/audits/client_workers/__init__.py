"""Programs that use a server through the clients of other projects. Another Python, or Node.js, runs them.

PROGRAM URL MODEL    runs the checks against the server at URL, and prints one JSON object per check

Each object has the name of the check and "ok", or what went wrong. The last object has the versions of the packages.
"""
