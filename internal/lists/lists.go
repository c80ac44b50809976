// Package lists turns a list into another, or into a sum: what package slices of the standard
// library leaves to loops.
package lists

import "slices"

// Map gives what f makes of each element.
func Map[E, T any](list []E, f func(E) T) []T {
	if list == nil {
		return nil
	}
	out := make([]T, len(list))
	for i, v := range list {
		out[i] = f(v)
	}
	return out
}

// Filter returns the elements for which f is true; nil if it is never true.
func Filter[E any](list []E, f func(E) bool) (out []E) {
	for _, v := range list {
		if f(v) {
			out = append(out, v)
		}
	}
	return out
}

// Sum adds what f makes of each element.
func Sum[E any, N int | int64 | uint64 | float64](list []E, f func(E) N) (sum N) {
	for _, v := range list {
		sum += f(v)
	}
	return sum
}

// Find gives the first element that f holds for, or the zero value.
func Find[E any](list []E, f func(E) bool) (found E) {
	for _, v := range list {
		if f(v) {
			return v
		}
	}
	return found
}

// Product multiplies what f makes of each element.
func Product[E any, N int | int64 | float64](list []E, f func(E) N) N {
	product := N(1)
	for _, v := range list {
		product *= f(v)
	}
	return product
}

// Most is the place of the first element of which f makes the largest number; 0 of an empty list.
func Most[E any, N int | int64 | float64](list []E, f func(E) N) (at int) {
	var most N
	for i, v := range list {
		if n := f(v); i == 0 || n > most {
			at, most = i, n
		}
	}
	return at
}

// Max is the largest number that f makes of an element, or least.
func Max[E any, N int | int64 | float64](list []E, least N, f func(E) N) N {
	for _, v := range list {
		least = max(least, f(v))
	}
	return least
}

// Pick returns the results of f for which it returns true; nil if it never does.
func Pick[E, T any](list []E, f func(E) (T, bool)) (out []T) {
	for _, v := range list {
		if x, ok := f(v); ok {
			out = append(out, x)
		}
	}
	return out
}

// Set holds the elements.
func Set[K comparable](list []K) map[K]bool {
	out := make(map[K]bool, len(list))
	for _, v := range list {
		out[v] = true
	}
	return out
}

// Resize returns a slice of n elements in the memory of buf, or in new memory if buf is too small.
// Unlike slices.Grow it allocates n elements and no more. The elements are not cleared.
func Resize[E any](buf []E, n int) []E {
	if cap(buf) < n {
		return make([]E, n)
	}
	return buf[:n]
}

// Sort sorts a list by a comparison; equal elements keep their order. It sorts the places of the
// elements and moves each element twice: unlike slices.SortFunc it adds no 30 KB to the binary for
// each type, and large elements are not swapped about.
func Sort[T any](list []T, compare func(a, b T) int) {
	order := places(len(list), func(i, j int) int { return compare(list[i], list[j]) })
	sorted := make([]T, len(list))
	for at, i := range order {
		sorted[at] = list[i]
	}
	copy(list, sorted)
}

// places lists the places of n elements in their order.
func places(n int, compare func(i, j int) int) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int {
		if c := compare(i, j); c != 0 {
			return c
		}
		return i - j
	})
	return order
}
