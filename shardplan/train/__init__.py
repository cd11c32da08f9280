"""Trains a model with Levanter's Trainer and a plan, watched as an evaluation is."""
