"""Is it still K3?"""
