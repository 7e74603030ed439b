"""Runtimes whose figures are recorded without a change to their code: one package a runtime."""
