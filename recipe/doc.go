// Package recipe turns run.toml into a checked [Recipe], the config of one training run.
//
// Each key is a field of Recipe with a struct tag, and a paragraph of keys.txt. [Parse] follows
// both, and the reference page and the commented [Example] are printed from them, so they cannot
// disagree. Parsing is strict: an unknown key, a value of the wrong type, and values that
// contradict each other are errors that name the line and the fix. Parse reads no file.
//
// A path is relative to the folder of run.toml, and may use $NAME. A run stores the recipe as it
// was written ([Recipe.String]), before such names are replaced, so that a run that moves together
// with its data remains the same run.
package recipe
