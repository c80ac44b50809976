package diag

// Nearest finds the name closest to what a person typed, so that an error can ask "did you mean".
// It answers "" when nothing is near: more than a third of the letters would have to change.
func Nearest(typed string, names []string) string {
	best, bestDistance := "", max(2, len(typed)/3)+1
	for _, name := range names {
		if d := distance(typed, name); d < bestDistance {
			best, bestDistance = name, d
		}
	}
	return best
}

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
