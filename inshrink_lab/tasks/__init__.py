"""Small trainings for the rehearsal that run on any machine."""
