"""The contents of a finished wheel, read as installers and loaders read it: nothing is unpacked, imported or run.

`wheel.read` gives its members and native modules, `facts.facts` what they amount to. Only an archive that no tool should unpack is refused
here; whether a wheel is as declared is the audit's to say.
"""
