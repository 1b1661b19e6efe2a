"""The lattice codec: integers on a uniform lattice, with changes coded by context rANS."""
