"""Watches this process: its activity, where it is stuck, and how it ends if it cannot continue."""
