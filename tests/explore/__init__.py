"""Exhaustive exploration of the real state machines of masked sums, and what must hold in every state.

Two explorations, breadth first, with the states hashed:

`server_moves` puts the clients of one round against a server that does what it likes. A state says of every
client what it has accepted so far, and so what it has given away. From each state every client may be
handed next everything in a finite menu: all true messages there are, in any order, or never, or twice, with
any subset of the silos in them; and false ones: replays of another round or run, echoed, forged and
strangers' keys, recipients swapped, shares and signatures altered, lists that overlap or differ between
clients, two models, two plans, steps asked for early and again. Every step is run on the real machine; a
step whose client and messages were met before is not run again. A refused client has given nothing more
away and answers nothing more, which is tried each time, so it is in the state in which it stopped: it is
counted and not followed further.

`honest_server` runs the real server with the real clients, where the network loses, repeats and reorders
messages as it likes and the server closes each step at any time.

Only public-key operations are replaced, by a cheap deterministic suite, through the machines' own
parameter. What must hold is stated over what *all* machines did, not as a client's checks are: a message is
*founded* if it is made of what the others' machines gave in the same round to the same end (`menu`); and
`invariants` says what follows from everything that was given away: no share of both kinds, no mask twice,
no sum of too few. `mutants` takes one check at a time out of the client, which the exploration must notice.

`python -m tests.explore` makes the larger sweep.
"""
