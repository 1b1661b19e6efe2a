"""The moments codec: optimizer state stored by scale and direction."""
