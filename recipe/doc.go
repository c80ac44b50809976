// Package recipe turns run.toml into a checked [Recipe]: everything that one training run needs to
// be told, and nothing twice.
//
// Each key is a row of one table (keys.txt, and keys.go for the fields), which [Parse] follows and
// from which the reference page and the commented [Example] are printed, so that they cannot
// disagree. Reading is strict: a key that there is not, a value of another type, and values that
// contradict each other are errors that name the line and what to write instead. Parse looks at no
// file but the text that it is given.
//
// A path is relative to the folder of run.toml, and may use $NAME. A recipe is stored as it was
// written ([Recipe.String]), before such names are replaced, so that a run that is moved together
// with its data remains the same run.
package recipe
