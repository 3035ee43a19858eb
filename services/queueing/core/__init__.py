"""What queueing decides: values in, decisions out. ``plan`` is the decision, ``ledger`` and ``words`` the handshakes.

``book`` alone changes: it is the memory of the one loop, and is built anew from rows whenever a commit fails.
"""
