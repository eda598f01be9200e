/* NOCUDA: ends at once. For the time of an exec. */
int main(void) {
    return 0;
}
