/* The functions of <string.h> that the hook's code and its compiler call: private copies for the hook.
 *
 * The hook cannot call the process's functions of these names, because that may end in a recursion. A program or a
 * sanitizer may replace them by wrappers that call dlsym, and the hook replaces dlsym. A sanitizer also calls dlsym at
 * its start, when its own memcpy and strcmp do not work yet.
 */
#include <stddef.h>
#include <string.h>

/* Stands at the end of each loop body. Without it the compiler would replace the loop by a call of the function that
 * the loop implements. */
#define TURN __asm__ volatile("" ::: "memory")

void *memcpy(void *to, const void *from, size_t size) {
    for (size_t i = 0; i < size; i++) {
        ((char *)to)[i] = ((const char *)from)[i];
        TURN;
    }
    return to;
}

void *memmove(void *to, const void *from, size_t size) {
    if ((const char *)to <= (const char *)from)
        return memcpy(to, from, size);
    for (size_t i = size; i > 0; i--) {
        ((char *)to)[i - 1] = ((const char *)from)[i - 1];
        TURN;
    }
    return to;
}

void *memset(void *to, int value, size_t size) {
    for (size_t i = 0; i < size; i++) {
        ((char *)to)[i] = (char)value;
        TURN;
    }
    return to;
}

int memcmp(const void *one, const void *other, size_t size) {
    const unsigned char *a = one, *b = other;
    for (size_t i = 0; i < size; i++) {
        if (a[i] != b[i])
            return a[i] - b[i];
        TURN;
    }
    return 0;
}

size_t strlen(const char *text) {
    size_t length = 0;
    for (; text[length] != '\0'; length++)
        TURN;
    return length;
}

int strncmp(const char *one, const char *other, size_t most) {
    const unsigned char *a = (const unsigned char *)one, *b = (const unsigned char *)other;
    for (size_t i = 0; i < most; i++) {
        if (a[i] != b[i] || a[i] == '\0')
            return a[i] - b[i];
        TURN;
    }
    return 0;
}

int strcmp(const char *one, const char *other) {
    const unsigned char *a = (const unsigned char *)one, *b = (const unsigned char *)other;
    for (; *a == *b && *a != '\0'; a++, b++)
        TURN;
    return *a - *b;
}

char *strchr(const char *text, int wanted) {
    for (; *text != (char)wanted; text++)
        if (*text == '\0')
            return NULL;
    return (char *)text;
}

char *strrchr(const char *text, int wanted) {
    const char *found = NULL;
    for (; *text != '\0'; text++)
        if (*text == (char)wanted)
            found = text;
    return (char *)found;
}
