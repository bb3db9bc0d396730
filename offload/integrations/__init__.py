"""What other programs run this one by, a file for each; nothing here is imported unless it is
named.
"""
