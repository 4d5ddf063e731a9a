"""A server with several engines, on Ray Serve: ``outrider serve --replicas``.

    prefix.py        which requests begin alike, and which replica they prefer
    router.py        the same as a router of Ray Serve
    calls.py         HTTP requests and responses between processes
    deployment.py    the replicas, and the process that HTTP reaches
    mark.py          keeps a second server from the same cluster
    run.py           starts them, restarts them one by one, and ends them

Each replica is a whole server (``outrider.serve``) without a port. Ray Serve starts the replicas,
checks their health, replaces those that die, counts and queues requests.

Needs the extra ``cluster``.
"""
