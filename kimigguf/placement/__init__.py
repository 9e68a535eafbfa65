"""Where does it go?"""
