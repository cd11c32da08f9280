"""Drop-in replacement for the saving half of Levanter's converter."""
