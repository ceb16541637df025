"""Tests on real ranks: the program that the ranks run stands above its test."""
