"""Small trainings that anyone can run: what the rehearsal trains."""
