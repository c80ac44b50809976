package diag

// Nearest finds the name closest to what a person typed, so that an error can ask "did you mean".
// It answers "" when nothing is near: more than a third of the letters would have to change, more
// than two of a short word, or more than one of a word of three letters. A word of more than 256
// letters is near nothing: comparing one would take long.
func Nearest(typed string, names []string) string {
	if len(typed) > maxTyped {
		return ""
	}
	best, bestDistance := "", max(2, len(typed)/3)+1
	if len(typed) <= 3 {
		bestDistance = 2
	}
	for _, name := range names {
		if d := distance(typed, name); d < bestDistance {
			best, bestDistance = name, d
		}
	}
	return best
}

const maxTyped = 256

// distance is the edit distance of Levenshtein (1966), kept in two rows.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
