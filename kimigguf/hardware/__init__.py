"""What is this machine?"""
