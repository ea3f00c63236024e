"""Programs that use a server through the clients of other projects. A separate Python, or Node.js, runs them.

PROGRAM URL MODEL    runs the checks against the server at URL, and prints one JSON object per check

Each object has the name of the check, and either "ok" or the error. The last object has the versions of the packages.
"""
