"""Watches this process: its activity, where it is stuck, and how it ends when it cannot continue."""
