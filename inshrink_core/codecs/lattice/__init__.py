"""The lattice codec: integers on a uniform lattice, their change, context rANS."""
