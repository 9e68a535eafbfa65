"""What does it need?"""
