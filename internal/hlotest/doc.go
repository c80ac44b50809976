// Package hlotest turns names and numbers into the protocol buffers of compiled programs, for the
// tests of what reads them.
package hlotest
