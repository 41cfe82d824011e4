"""The protocol: conversion between its messages and our values."""
