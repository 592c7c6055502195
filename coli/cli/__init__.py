"""The command line: parse, call one function, print. Only this package imports click."""
