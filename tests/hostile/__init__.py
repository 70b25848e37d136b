"""Inputs meant to do harm, built from good ones by one mutation each."""
