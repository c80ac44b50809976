// Package environ turns the environment of a process into what of it may change numbers: compilers
// and libraries of an engine read variables that no recipe shows.
package environ
