// Package abtest turns sides that train one small GPT, each in its own framework, into a table of
// how fast they are. All begin from the same weights and tokens and are held to the same losses;
// they take turns in one run, so that a loaded machine loads them all.
package abtest
