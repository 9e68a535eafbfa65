"""Which quants exist?"""
