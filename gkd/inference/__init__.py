"""Engines that sample, score and rate, each a class of one protocol (:mod:`gkd.inference.engine`)."""
