"""What is in these files?"""
